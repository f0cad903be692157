"""A game with a state: the environment hides a number, the policy guesses, the environment says where to go on."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.sample import Prompt
from megarl.rewards.reward import Reward
from megarl.rollout.conversation import AsyncGenerate

END_OF_GUESS = "."


@dataclass
class Game:
    """One game. A conversation makes its own: nothing is shared, however many are played at once."""

    hidden: int
    max_guesses: int
    num_guesses: int = 0
    is_won: bool = False

    def take(self, guess: str) -> str:
        """What the environment says to a guess such as ``5.``"""
        self.num_guesses += 1
        number = guess.removesuffix(END_OF_GUESS)
        if not number.isdigit():
            return "number? "
        self.is_won = int(number) == self.hidden
        return "higher " if int(number) < self.hidden else "lower "

    @property
    def is_over(self) -> bool:
        """Won, or out of guesses."""
        return self.is_won or self.num_guesses >= self.max_guesses


async def converse(prompt: Prompt, generate: AsyncGenerate, *, max_guesses: int) -> Reward:
    """1 for the right number at once, a little less for every guess more, 0 if it is not found."""
    game = Game(int(prompt.answer or ""), max_guesses)
    turn = await generate(stop=END_OF_GUESS)
    told = game.take(turn.text)
    while turn.finish == "stop" and not game.is_over:
        turn = await generate(told, stop=END_OF_GUESS)
        told = game.take(turn.text)
    value = 1 - 0.5 * (game.num_guesses - 1) / max_guesses if game.is_won else 0.0
    return Reward(value, {"is_won": float(game.is_won), "num_guesses": game.num_guesses})
