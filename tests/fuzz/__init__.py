"""Fuzzing: every parser raises only its documented errors, whatever it is given (`make fuzz`)."""
