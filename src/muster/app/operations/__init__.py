"""Operations on a complete domain: audit, backup, doctor, retention, capacity."""
