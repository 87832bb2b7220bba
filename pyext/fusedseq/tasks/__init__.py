"""The documented tasks, what they share (`training`), and the commands over them."""
