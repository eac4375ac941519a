"""32 prompts of many kinds, from 1 to about 240 tokens: questions in the chat format, prose, code, digits, other scripts."""

CHATS = (
    "What is the capital of France?",
    "Hi!",
    "Write two sentences about the sea.",
    "Explain to a child why the sky is blue.",
    "List three prime numbers larger than 100.",
    "Translate to German: The weather is fine today, but tomorrow it will rain.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Who wrote 'Pride and Prejudice', and when was it published?",
    "Give me a recipe for pancakes for four people, with amounts in grams and millilitres.",
    "What is 17 * 23? Show the steps.",
    "Summarise in one sentence: The committee met on Tuesday to discuss the budget for the coming year. After a long debate about the "
    "cost of repairing the old bridge, which has been closed since March, the members agreed to postpone the decision until an "
    "independent engineer has examined the foundations. In the meantime the ferry will run twice an hour, and the town will pay half "
    "of each fare for residents who can show proof of address.",
    "Write a short poem about an old lighthouse 🗼 and the ships 🚢 it guides.",
)
"""User messages; the chat template puts its system message in front of each, so these share a prefix."""

TEXTS = (
    "Once upon a time",
    "The",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "3.14159265358979323846264338327950288419716939937510",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) AS orders\nFROM customers\nJOIN orders ON customers.id = orders.customer_id\nWHERE",
    '{"name": "Ada Lovelace", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London", "street":',
    "<html>\n  <head>\n    <title>My first page</title>\n  </head>\n  <body>\n    <h1>Welcome</h1>\n    <p>",
    "Naïve café façade: coöperation, Übermut, señor, Ærøskøbing, Łódź —",
    "Привет, мир! Сегодня",
    "日本の首都は東京です。フランスの首都は",
    "😀😃😄 means happy, 😢 means sad, and 😡 means",
    "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε. In words:",
    "   leading spaces,\ttabs\tand\n\n\nempty lines\n\n   then",
    "Q: What is the boiling point of water at sea level?\nA: 100 degrees Celsius.\n\nQ: What is the largest planet of the solar system?\nA:",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the epoch of "
    "belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the spring of hope, it "
    "was the winter of despair, we had everything before us, we had nothing before us, we were all going direct to Heaven, we were all "
    "going direct the other way - in short, the period was so far like the present period, that some of its noisiest authorities "
    "insisted on its being received, for good or for evil, in the superlative degree of comparison only.\n\nThere were a king",
    "The following is a conversation with a patient librarian. The librarian knows every shelf of the building, answers briefly, and "
    "never guesses: when she does not know, she says so and names a book in which the answer may be found.\n\nVisitor: Good morning. I am "
    "looking for something about the history of clocks.\nLibrarian: Good morning. Second floor, third aisle on the left, under the "
    "window. Begin with the thin green one.\nVisitor: Thank you. And is there anything about how sailors found their way before they had "
    "clocks that kept time at sea?\nLibrarian: Yes, in the next aisle. They used the stars, the sun at noon, the colour of the water and a "
    "good deal of experience. Dead reckoning is the word to look for.\nVisitor: Wonderful. One more thing: who was the first to build a "
    "clock that could be trusted on a ship?\nLibrarian:",
    "Chapter 7. On the keeping of bees\n\nA hive is best placed where the morning sun reaches it early, with its back to the wind and its "
    "entrance towards the south or the east. The grass before it should be kept short, so that those who return heavily laden do not fall "
    "into it and are lost. Water must be near; where there is none, a shallow dish with a few flat stones will do, provided that it is "
    "filled every day. In spring the keeper looks for three things: whether the queen is laying, whether there are stores enough to last "
    "until the fruit trees flower, and whether the comb is dry and free of moths. He works slowly and without jerks, uses little smoke, "
    "and closes the hive again within a quarter of an hour. In summer he gives room before it is needed, for bees that are crowded "
    "prepare to leave, and a swarm in the neighbour's chimney is nobody's honey. In autumn he takes what can be spared and not a pound "
    "more; he narrows the entrance against robbers and mice, and puts a weight upon the roof. In winter he leaves them alone, except that "
    "after a heavy fall of snow",
    "Mon 01 08:00 12.5 C\nTue 02 08:00 13.1 C\nWed 03 08:00 11.8 C\nThu 04 08:00",
)
"""Prompts continued as they are."""
