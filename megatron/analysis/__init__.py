"""Theory, statistics, tables and figures: what turns results into claims."""
