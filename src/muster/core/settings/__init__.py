"""Settings mechanism and the sections every process shares."""
