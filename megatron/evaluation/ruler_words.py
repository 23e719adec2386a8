"""Plain English words for RULER's keys and lists, so that nothing need be downloaded."""

from __future__ import annotations

__all__ = ["ADJECTIVES", "NOUNS", "VERBS", "distinct_words", "key_words"]

_ADJECTIVES = """
    able ancient angry bitter blank blunt bold brave brief bright broad busy calm careful cheap
    civil clean clear clever close coarse cold common cool crisp curious damp dark deep dense dim
    dry dull eager early easy empty equal even exact faint fair famous fast fierce fine firm flat
    foggy formal free fresh gentle giant glad gloomy golden good grand grave great green grey grim
    hard harsh heavy high hollow honest humble idle jolly keen kind large late lazy lean light
    little lively local lonely long loose loud low loyal lucky mad major mellow mild minor modern
    modest narrow neat noble noisy novel odd old open pale patient plain polite poor proud pure
    quick quiet rapid rare raw ready rich rigid ripe rough round royal rude sad safe salty sharp
    short shy silent simple slim slow small smart smooth sober soft solid sour spare steady steep
    stern stiff strange strict strong sudden sunny sweet swift tall tame tender thick thin tidy
    tiny tired tough urgent vague vast vivid warm weak weary wet white wide wild wise young
"""
_NOUNS = """
    acorn anchor ankle apple apron arrow autumn badge bakery balcony banana barrel basket beach
    beard bell bench berry bicycle blanket blossom boat bottle branch bread bridge broom bucket
    butter button cabin cactus camel candle canyon carpet carrot castle cattle ceiling cellar
    chain chalk cherry chimney circle cliff clock cloud coast coffee collar comet copper coral
    corner cottage cotton cousin cradle crater creek cricket crown curtain daisy desert diamond
    dolphin donkey dragon drawer drum eagle elbow engine envelope falcon farmer feather fence
    fiddle finger flag flame flower flute forest fountain fox garden garlic gate ginger glacier
    glove goat grape gravel guitar hammer harbor harvest hedge helmet heron hill honey horse
    hotel island ivory jacket jungle kettle kitchen kite ladder lake lamp lantern leather lemon
    letter lizard lobster locket lumber magnet maple marble market meadow medal melon metal mirror
    monkey mountain mushroom napkin needle nephew north notebook oak ocean olive onion orchard
    otter oven owl paddle palace panda paper parrot pasture peach pebble pencil pepper piano
    pillow pilot pine planet plum pocket poem pond potato prairie pumpkin puzzle rabbit radio
    raven ribbon river rocket roof rope saddle sail salmon sandal saucer scarf school sculptor
    season shadow shell shirt shoulder shovel signal silver sister sleeve soldier spider spoon
    squirrel stable statue station stone storm stove string summer sunset table tailor teacher
    temple thunder ticket tiger timber tower trail trumpet tunnel turtle umbrella uncle valley
    velvet village violin wagon walnut water weaver whale wheat whistle willow window winter wolf
    wool yard zebra
"""
_VERBS = """
    admire agree allow answer appear argue arrive attach avoid bake balance beg behave believe
    blink boil borrow bounce bow breathe build bury carry carve catch chase cheer chew choose climb
    collect comb compare complain cook cough count crawl cross cry dance decide deliver describe
    dig discover dive divide draw dream drift earn enjoy escape explain fasten fetch fill fold
    follow forget forgive gather glow greet grow guess guide hang happen heal hesitate hide hope
    hurry imagine improve invent invite join juggle jump kneel knit knock laugh launch lean learn
    listen manage march melt mend mix mourn move multiply nod notice obey observe offer order
    paint pause peel perform plant polish pour practise pray predict prepare protect prove pull
    punish push quarrel reach recall reduce refuse remain remember remind repair repeat reply
    rescue rest return rise roar row rub sail scatter scream search send sew shake share shine
    shiver sing sketch sleep slide smile sneeze solve spell spread sprint squeeze stare steal stir
    strengthen stretch suggest surround survive swallow sweep swim teach tease thank think throw
    tickle travel tremble trust twist unite vanish visit wait walk wander warn wash weave whisper
    wink wish wonder work wrap write yawn
"""
ADJECTIVES, NOUNS, VERBS = (tuple(text.split()) for text in (_ADJECTIVES, _NOUNS, _VERBS))


def key_words() -> list[str]:
    """Keys of needles: an adjective and a noun."""
    return [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


def distinct_words() -> list[str]:
    """Words for lists: single ones, none inside another (a match would count twice), then pairs."""
    single = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    apart = [
        word for word in single if not any(word != other and word in other for other in single)
    ]
    return [*apart, *key_words()]
