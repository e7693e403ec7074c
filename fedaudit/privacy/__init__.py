"""What is promised, and what it costs: policies, mechanisms, accounting, the ledger."""
