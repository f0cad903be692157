"""Generation engines: token ids in, token ids and log-probs out (see `core.protocols.Engine`)."""
