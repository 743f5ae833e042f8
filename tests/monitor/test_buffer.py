from __future__ import annotations

from muster.monitor.sensor import disk_buffer


def test_in_order_and_across_a_restart(tmp_path):
    first = disk_buffer.ReportBuffer(tmp_path, bytes_max=1600)
    for number in range(30):
        first.append(b"%04d" % number)
    assert first.peek(3) == [b"0000", b"0001", b"0002"]
    first.done(3)
    assert len(first) == 27
    second = disk_buffer.ReportBuffer(tmp_path, bytes_max=1600)  # how far the first one was is not remembered
    actual = []
    while rows := second.peek(7):
        actual += rows
        second.done(len(rows))
    assert actual == [b"%04d" % number for number in range(30)]
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_and_are_counted(tmp_path):
    held = disk_buffer.ReportBuffer(tmp_path, bytes_max=16 * 50)
    for number in range(1000):
        held.append(b"%04d" % number)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 800
    assert len(held) + held.dropped == 1000
    assert held.peek(1) == [b"%04d" % held.dropped]


def test_a_torn_line_is_cut_off(tmp_path):
    held = disk_buffer.ReportBuffer(tmp_path)
    held.append(b"whole")
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes() + b"tor")
    again = disk_buffer.ReportBuffer(tmp_path)
    again.append(b"next")
    assert again.peek(5) == [b"whole", b"next"]


def test_reports_have_any_bytes_and_a_damaged_line_delays_no_other(tmp_path):
    held = disk_buffer.ReportBuffer(tmp_path)
    reports = [b"", b"\n", b"\n\x00\xff\n", bytes(range(256))]
    for report in reports:
        held.append(report)
    path = next(tmp_path.iterdir())
    path.write_bytes(b'{"kind"\n' + path.read_bytes())
    assert disk_buffer.ReportBuffer(tmp_path).peek(9) == [b'{"kind"', *reports]
