"""The second hop's stream, and who waits for a transfer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from libra.runtime.all_to_all import Transfer, on_stream


def test_the_stream_aside_begins_behind_the_current_one() -> None:
    calls = mock.Mock()
    stream, current = calls.stream, calls.current
    calls.entered.return_value = mock.MagicMock()
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=current),
        mock.patch.object(torch.cuda, "stream", calls.entered),
        on_stream(stream),
    ):
        calls.work()
    steps = [name for name, *_ in calls.mock_calls if "__" not in name]
    assert steps == ["stream.wait_stream", "entered", "work"]
    assert stream.wait_stream.call_args == mock.call(current)
    assert calls.entered.call_args == mock.call(stream)


def test_without_one_work_stays_in_the_current_stream() -> None:
    with mock.patch.object(torch.cuda, "stream") as entered, on_stream(None):
        pass
    assert not entered.called


def transfer(device: str, work: Any) -> Transfer:
    rows = torch.empty(1, device=device)
    return Transfer(rows, rows, work, mock.Mock())


def test_two_streams_may_wait_for_what_arrives() -> None:
    work = mock.Mock()
    under_way = transfer("meta", work)  # any device whose streams wait, not this thread
    under_way.wait()
    under_way.wait()
    assert work.wait.call_count == 2


def test_on_a_cpu_the_rows_have_arrived_and_are_not_waited_for_again() -> None:
    work = mock.Mock()
    work.is_completed.return_value = True
    under_way = transfer("cpu", work)
    under_way.wait()
    under_way.wait()
    assert work.wait.call_count == 1
