"""Puts the fault that SEEDED_FAULT names in its place, in every Python process that has this folder on its path."""

import functools
import importlib.machinery
import importlib.util
import os
import sys


class Seeding:
    """Finds the fault's module as the other finders do, and changes it once it has run; and the extension that
    SEEDED_EXTENSION names."""

    def __init__(self, fault):
        self.fault = fault

    def find_spec(self, name, path=None, target=None):
        if name == "jaxmp._jaxmp" and (file := os.environ.get("SEEDED_EXTENSION")):
            return importlib.util.spec_from_file_location(name, file)
        if name != self.fault.module:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)))
        run = spec.loader.exec_module

        def run_and_seed(module):
            run(module)
            seed(module, self.fault)

        spec.loader.exec_module = run_and_seed
        return spec


def seed(module, fault):
    """Put the fault in place of a function, a method or a property of the module."""
    *classes, name = fault.name.split(".")
    owner = functools.reduce(getattr, classes, module)
    original = vars(owner)[name]
    if isinstance(original, property | functools.cached_property):
        value = original.fget if isinstance(original, property) else original.func
        setattr(owner, name, property(functools.partial(fault.replace, value)))
        return

    @functools.wraps(original)
    def replaced(*args, **kwargs):
        return fault.replace(original, *args, **kwargs)

    setattr(owner, name, replaced)


if fault_name := os.environ.get("SEEDED_FAULT"):
    from faults import FAULTS

    sys.meta_path.insert(0, Seeding(FAULTS[fault_name]))
