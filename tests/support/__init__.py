"""What several test files share: engines and prompts on tiny models, oracles, runs, videos."""
