"""What is promised, and what is found: policies, mechanisms, accounting, lower bounds."""
