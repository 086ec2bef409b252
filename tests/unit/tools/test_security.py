"""SECURITY.md compared with the code and the tests that it names."""

import ast
import re

import pytest

from checkout import ROOT
from documents import code, table
from sglang_triattn import __version__
from sglang_triattn.patches.hooks.hook import SGLANG_VERSION
from sglang_triattn.request.options import FIELDS, LONGEST_NAME

SECURITY = ROOT / "SECURITY.md"
THREATS = table(SECURITY, "What an attacker could want", "threat")
LIMITS = table(SECURITY, "What a client can make grow", "what")


@pytest.mark.parametrize("row", [*THREATS, *LIMITS], ids=lambda row: row[0])
def test_every_claim_is_tested(row):
    """Prevents a promise that no test holds, and one whose test was renamed or removed."""
    named = code(row[-1])
    assert named
    for test in named:
        path, _, name = test.partition("::")
        functions = {
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, test


def test_limits_are_those_of_the_code():
    """Prevents limits that the code has changed since."""
    limits = {row[0]: row[1] for row in LIMITS}
    assert limits["a conversation's name"] == f"{LONGEST_NAME} characters"
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    assert limits["fields of a request"].startswith(words[len(FIELDS) - 1])


def test_the_supported_version_is_this_one():
    """Prevents a policy for another version than the code's."""
    text = SECURITY.read_text()
    assert set(re.findall(r"\d+\.\d+\.\d+", text)) == {__version__, SGLANG_VERSION}
