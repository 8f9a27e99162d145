"""Reads the text of a compiled program."""

import re

import jax

from jaxmp._src.platform.runtime import native

COLLECTIVE = r"(all-gather|all-reduce|reduce-scatter|collective-permute|collective-broadcast|all-to-all)(?:-start)?\("


def compiled_text(program, *args):
    return jax.jit(program).lower(*args).compile().as_text()


def calls_of(text):
    """Returns the patterns of our custom calls, sorted."""
    return sorted(re.findall(rf'custom_call_target="{native.TARGET}".*?pattern = "(\w+)"', text))


def collectives_of(text):
    return sorted(re.findall(COLLECTIVE, text))


def other_products_of(text):
    """Returns the products that XLA computes itself."""
    return re.findall(r" (?:dot|convolution)\(", text)
