"""The type checker behind `--jaxtyping-packages`: tensor shapes, and int where a float is due."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
