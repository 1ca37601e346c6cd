"""Agent programs that play episodes against the policy, through an OpenAI-compatible endpoint."""
