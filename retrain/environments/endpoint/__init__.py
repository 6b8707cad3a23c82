"""An OpenAI-compatible address on loopback, at which programs that bring their own loop ask the policy."""
