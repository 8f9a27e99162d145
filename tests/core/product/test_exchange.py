"""How NCCL's ids pass through Python: the functions that the compiled side calls before its ranks have a communicator.
Without these tests, an exception in the callback could end the process on one of XLA's threads, or a value could be cut
at its first zero byte and be an unusable id."""

import threading

import pytest

from jaxmp._src.platform.runtime import native

ID = b"i" + bytes(range(128))


@pytest.fixture
def extension():
    module = native.extension()
    yield module
    module.set_exchange(None)


def test_threads_of_one_process_meet_in_a_table(extension):
    received = []
    waiting = threading.Thread(target=lambda: received.append(extension.exchange("table/id", None, 60.0)))
    waiting.start()
    assert extension.exchange("table/id", ID, 60.0) == ID
    waiting.join(60)
    assert received == [ID]


def test_nobody_waits_for_ever(extension):
    with pytest.raises(RuntimeError, match="no thread of this process published it"):
        extension.exchange("table/never", None, 0.05)


def test_the_callback_sees_key_value_and_timeout(extension):
    calls = []

    def exchange(key, value, timeout):
        calls.append((key, value, timeout))
        return ID if value is None else value

    extension.set_exchange(exchange)
    assert extension.exchange("a/b", None, 1.5) == ID
    assert extension.exchange("a/b", b"", 2.5) == b""
    assert calls == [("a/b", None, 1.5), ("a/b", b"", 2.5)]


def test_what_the_callback_raises_is_the_ranks_error(extension):
    def exchange(key, value, timeout):
        raise TimeoutError(f"rank 3 did not publish {key}")

    extension.set_exchange(exchange)
    with pytest.raises(RuntimeError, match=r"^rank 3 did not publish a/b$"):
        extension.exchange("a/b", None, 1.0)


def test_a_callback_that_returns_no_bytes_is_an_error(extension):
    extension.set_exchange(lambda key, value, timeout: "text")
    with pytest.raises(RuntimeError, match=r"^exchange: a/b: expected bytes, the callback returned str$"):
        extension.exchange("a/b", None, 1.0)
