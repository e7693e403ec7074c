"""One run: the method, its parties, the task that runs on a client, engines, evaluation, the folder it leaves."""
