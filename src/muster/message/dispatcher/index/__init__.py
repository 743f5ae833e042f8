"""The parts of a backlog's index: sorted numbers, ranges, lines of consumers, groups. Pure."""
