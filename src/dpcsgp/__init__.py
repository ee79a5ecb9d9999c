"""Private, compressed, serverless training over directed graphs."""
