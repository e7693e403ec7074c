"""The wire, the only way between the parties: the messages, the codec that makes bytes of them, and the transcript."""
