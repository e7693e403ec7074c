"""Audits of a claimed epsilon: lower bounds, tests of the noise that was sent, and one verdict on all of them.

Each audit works on a run that is finished. `release_path` tries the path of a release, `residuals` tests the noise,
`gradient_canaries` and `one_run` bound the epsilon of training; `joint_verdict` says what they show together.
"""
