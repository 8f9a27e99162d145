"""A plugin of pytest (`-p recorded_tests`): every test's end is recorded at once, and what has ended is left out.

GPU_SESSION_TASK names the task. Under pytest-xdist the first process records for all.
"""

import os

import record

_TASK = os.environ["GPU_SESSION_TASK"]


def pytest_collection_modifyitems(config, items):
    ended = record.ended(_TASK)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in ended])
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    def pytest_runtest_logreport(self, report):
        is_end = report.when == "call" or report.outcome != "passed"  # or a failure, or a skip, ahead of the test
        if not is_end:
            return
        found = {"seconds": round(report.duration, 3), "outcome": report.outcome}
        if report.outcome != "passed":
            found["why"] = str(report.longrepr)[-4000:]
        if report.capstdout:
            found["printed"] = report.capstdout[-2000:]
        record.add(_TASK, report.nodeid, record.FAILED if report.outcome == "failed" else record.PASSED, **found)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == 5:  # nothing is left to run
        session.exitstatus = 0
