"""Rules, alert states, silences, alert notifications."""
