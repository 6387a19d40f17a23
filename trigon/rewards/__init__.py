"""What an answer is worth: the reward contract, and the killable processes that user code runs in."""
