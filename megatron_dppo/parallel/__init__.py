"""Collective maths over explicit process groups; knows neither Megatron nor any loss."""
