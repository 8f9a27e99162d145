"""Flags that JAX marks as its coming defaults, for `make test-flags`: NAME=VALUE of an environment variable a line."""

from jax._src import config

# Said beside the default, in JAX's source or changelog, and not by the mark that others have.
SAID_ELSEWHERE = {"jax_auto_pcast": False, "eager_constant_folding": True}
# In JAX 0.12 a scan has no derivative under this one.
NOT_YET = {"jax_scan3"}
MARK = config.UPGRADE_BOOL_HELP.split("(")[0].strip()
FLAGS = config.config._value_holders


def coming() -> dict[str, bool]:
    """The value that each flag of this JAX is to have, where it has another one now."""
    marked = {name for name, flag in FLAGS.items() if MARK in (flag.__doc__ or "")}
    values = SAID_ELSEWHERE | dict.fromkeys(sorted(marked - NOT_YET), True)
    return {name: value for name, value in values.items() if FLAGS[name].value is not value}


if __name__ == "__main__":
    print(*(f"{name.upper()}={int(value)}" for name, value in coming().items()), sep="\n")
