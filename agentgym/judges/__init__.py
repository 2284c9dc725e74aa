"""Models that an env asks by name: questions, judges and simulated users."""
