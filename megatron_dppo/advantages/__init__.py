"""Rewards of a group of responses to the advantages of their tokens. Pure torch, without collectives."""
