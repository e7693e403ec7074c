"""lora_text: adapters on a small frozen transformer, trained on text that every Python installation has."""
