"""What one request asks for, and its life: who owns which part of its row."""
