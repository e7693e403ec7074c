"""Many runs: suites, their schedule, their cost, their budgets."""
