"""Errors as users' programs see them."""

from __future__ import annotations

import copy
import pickle
import traceback

from muster.core import errors


def test_a_traceback_shows_the_hint():
    error = errors.Unavailable("the domain is not running", hint="start it with `muster up`")
    for same in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        *_, message, hint = "".join(traceback.format_exception(same)).splitlines()
        assert message.endswith("Unavailable: the domain is not running")
        assert hint == "hint: start it with `muster up`"
    assert "hint" not in "".join(traceback.format_exception(errors.NotFound("no such thing")))
