"""The manager's queue of resources whose next step is due."""

from __future__ import annotations

import math
import sys
from typing import cast

from muster.bus import api
from muster.manage.manager import manager
from tests.manage.test_heartbeats import RecordingTransport


async def test_the_queue_is_small_again_after_all_resources_were_in_it():
    """A set that is emptied keeps its size: every later event would read all of it."""
    keeper = manager.Manager(cast(api.Bus, RecordingTransport()))
    keeper.renewal.valid_until = math.inf
    keeper._queue.update(map(str, range(10_000)))
    keeper._start_steps()
    assert sys.getsizeof(keeper._queue) == sys.getsizeof(set())
