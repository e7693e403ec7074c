"""Privacy: policies, the mechanisms that carry them out, the accounting of their cost, and the ledger."""
