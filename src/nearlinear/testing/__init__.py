"""Testing a script under many processes, faults and slow links."""
