"""The batch face: the store on a Unix socket. It translates frames to calls of the engine, and decides nothing."""
