"""What happens in the driver, the process of the user's command, before Ray starts: a run is checked and its settings are filled in."""
