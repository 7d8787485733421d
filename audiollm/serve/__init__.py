"""The command `serve`: trained models behind the addresses that clients of OpenAI's kind speak to."""
