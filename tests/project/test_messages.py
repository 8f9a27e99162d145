"""A user who searches the documents for an error has to find it."""

import re

import messages
import pytest

from jaxmp._src.explain import rows
from jaxmp._src.fuse import rewrite

PAGE = (messages.ROOT / "docs" / "troubleshooting.md").read_text()
LISTED = re.findall(r"^- `(.+?)`\\?$", PAGE.partition("## The installation")[2], flags=re.M)


def test_every_public_message_is_on_the_page_of_troubleshooting():
    """Add a message to the section of what is wrong, in docs/troubleshooting.md, with what to do if it does not say."""
    found = messages.public_messages()
    assert len(found) > 200
    assert not {text: place for text, place in found.items() if text not in LISTED}


def test_the_page_lists_no_message_that_is_gone():
    assert not set(LISTED) - set(messages.public_messages())
    assert len(LISTED) == len(set(LISTED))


def test_every_section_says_what_is_wrong():
    sections = re.split(r"^## ", PAGE, flags=re.M)[2:]
    assert len(sections) > 20
    for section in sections:
        title, _, text = section.partition("\n\n")
        assert len(text.partition("\n- ")[0].split()) >= 10, title


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("…: rows of … and columns of … are both sharded; pass", "rows of … and columns of … are both sharded"),
        ("matmul: c was given without beta; pass", "matmul: c was given without beta"),
        ("…: x is …, got …; convert", "x is …, got …; convert"),  # too short to be found alone
    ],
)
def test_a_message_is_known_by_its_beginning(message, expected):
    assert messages.head(message) == expected


def test_every_reason_of_explain_is_in_the_documents():
    """In docs/fuse.md why a product stays JAX's, in docs/troubleshooting.md why a collective runs beside the calls."""
    stays = (messages.ROOT / "docs" / "fuse.md").read_text()
    assert [reason for reason in rewrite.REASONS.values() if f"*{reason}" not in stays] == []
    beside = (*rewrite.NOTES.values(), *rows._COMMUNICATES.values(), *rows._SCOPES.values())
    assert [reason for reason in beside if f"*{reason}*" not in PAGE] == []
