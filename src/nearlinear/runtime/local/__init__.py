"""Training across the Internet without a framework: updates as bytes, members that come and go, rounds of averaging."""
