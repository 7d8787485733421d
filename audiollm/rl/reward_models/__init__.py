"""Reward models: the stage `train_reward`, and scores of answers by a trained one."""
