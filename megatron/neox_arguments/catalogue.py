"""Every method that `pos_emb` can name, one line each; importing this does not import torch.

Registry, config check, dry run, config reference, tables, reports, model cards and the
conversion to other codes' files read this list. A new method is one class (in
`megatron/model/positional_embeddings.py`) and one line here. A name that is not in it may still be
registered, or be `module:ClassName`: a kernel of your own needs no line.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from megatron.errors import ConfigError, UnknownPositionalEmbeddingError


@dataclass(frozen=True)
class Method:
    """One positional embedding: its names, label and formula."""

    name: str
    """The value of `pos_emb`."""
    label: str
    """The one name in tables, figures, reports and cards."""
    summary: str
    formula: str = ""
    """LaTeX, in the distance d and the learned r_1, r_2, ...; empty where there is no table."""
    official: str | None = None
    """The value of `pos_emb` in the official KERPLE code; an alias here."""
    in_neox: bool = False
    """Whether GPT-NeoX has it under the same name."""


METHODS: dict[str, Method] = {
    entry.name: entry
    for entry in (
        Method("kerple_log", "KERPLE-log", "the logarithmic variant, the paper's best",
               r"-r_1\,\log(1+r_2 d)", official="kerple_log"),
        Method("kerple_power", "KERPLE-power", "the power variant",
               r"-r_1\,d^{\,r_2}", official="kerple_power_ap_"),
        Method("kerple_log3", "KERPLE 3-para-log", "the log variant with an exponent inside",
               r"-r_1\,\log(1+r_2 d^{\,r_3})"),
        Method("kerple_bias_wht", "KERPLE bias+wht", "the power variant with a weight on scores",
               r"-r_1 d^{\,r_2},\quad \exp(-r_3 d^{\,r_4})",
               official="kerple_power_ap_ap"),
        Method("gauss_bias2", "2-para-bias", "a Gaussian bump as a bias",
               r"r_1\exp(-r_2 d^2)"),
        Method("gauss_bias3", "3-para-bias", "the same with a learned exponent",
               r"r_1\exp(-r_2 d^{\,r_3})"),
        Method("gauss_wht1", "1-para-wht", "a Gaussian as a weight on scores",
               r"\exp(-r_1 d^2)"),
        Method("gauss_wht2", "2-para-wht", "the same with a learned exponent",
               r"\exp(-r_1 d^{\,r_2})", official="kerple_power__ap"),
        Method("alibi", "ALiBi", "linear bias with fixed slopes",
               r"-\mathrm{slope}_h\,d", in_neox=True),
        Method("alibi_learned", "ALiBi (learned)", "linear bias with slopes that are trained",
               r"-r_1\,d"),
        Method("kerple_power_original", "ALiBi (floored)",
               "ALiBi inside the official code's power kernel",
               r"-\max(0.01,\,\mathrm{slope}_h)\,d", official="kerple_power_original"),
        Method("rpe", "T5 bias", "a learned value per distance bucket",
               r"b_{\mathrm{bucket}(d)}\sqrt{\mathrm{head\_dim}}", in_neox=True),
        Method("sandwich", "Sandwich", "inner products of sinusoids as a bias",
               r"\frac{H}{8h}\left(\sum_{i=1}^{64}\cos\frac{d}{10000^{2i/128}}-64\right)"),
        Method("bam", "BAM", "a generalised Gaussian prior: a power of distance up to 4",
               r"-e^{\,r_1}(d+10^{-5})^{\,r_2}"),
        Method("bam_ssmax", "BAM SSMax", "BAM's prior, and all scores of n keys times s log n",
               r"-e^{\,r_1}(d+10^{-5})^{\,r_2}"),
        Method("ape", "APE", "linear, log and square root of distance, and a weight on scores",
               r"-(r_1 d+r_2\log(1+d)+r_3\sqrt{d}),\quad 1/(1+r_4 d)"),
        Method("kerple_inkling", "KERPLE-Inkling",
               "the log variant, and near the query features of query and distance",
               r"-r_1\,\log(1+r_2 d)+\sum_r f_r(x_m)\,P_{r d}"),
        Method("inkling", "Inkling", "features of the query times features of distance"),
        Method("fire", "FIRE", "a small network of the distance over the query's position"),
        Method("cable", "CABLE", "each token subtracts a learned amount from the scores across it"),
        Method("rotary", "Rotary", "queries and keys rotated by position",
               in_neox=True),
        Method("xpos", "xPos", "rotary with scores that decay, fastest in the fastest pairs"),
        Method("sinusoidal", "Sinusoidal", "fixed sines and cosines added to the input",
               in_neox=True),
        Method("learned", "Learned", "a vector per position, none beyond training length",
               in_neox=True),
        Method("none", "NoPE", "no positional embedding", in_neox=True),
    )
}  # fmt: skip


def aliases() -> dict[str, str]:
    """Other names of methods -> ours."""
    return {
        entry.official: entry.name
        for entry in METHODS.values()
        if entry.official and entry.official != entry.name
    }


def canonical_method(name: str) -> str:
    """Our name behind one of the official code's; any other stays as it is."""
    return aliases().get(name, name)


def method(name: str) -> Method | None:
    """What is known about `name`; None for a method of the user's own."""
    return METHODS.get(canonical_method(name))


def label_of(name: str) -> str:
    """The label in tables and figures; `module:Class` has the class's name.

    Methods of a model's layers are joined by `+`.
    """
    if "+" in name:
        return " + ".join(map(label_of, name.split("+")))
    known = method(name)
    return known.label if known else name.rpartition(":")[2]


def check_position_name(name: str) -> None:
    """ConfigError unless `name` is known, registered or importable as module:ClassName."""
    if method(name) is not None:
        return
    registry = importlib.import_module("megatron.model.position_names")
    try:
        registry.positional_embedding_class(name)
    except UnknownPositionalEmbeddingError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # the user's module is executed here and may raise anything
        raise ConfigError(
            f"pos_emb = {name!r:.80}: importing it failed with {type(error).__name__}: {error}."
        ) from error
