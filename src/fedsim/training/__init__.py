"""What trains: clients, the model that they load, their optimizer and labels; and the server."""
