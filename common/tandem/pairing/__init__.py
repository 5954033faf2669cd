"""Which nodes form a pair: quarantine signals, likeness, capacity, choice. Pure; the policy is data."""
