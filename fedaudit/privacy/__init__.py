"""Privacy: policies, the mechanisms that carry them out, accounting of their cost, and lower bounds from audits."""
