"""Predicts the times of collectives and training steps on a described cluster."""
