"""Fake GPUs in every Python process of a rehearsal (session.py --over-fakes), ahead of what it imports."""

import fake_gpus  # noqa: F401
