"""What a run writes into its folder, as data types, and how it is read again."""
