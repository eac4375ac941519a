"""A user's program with mistakes, which a type checker is to find: one in each line that ends with `# wrong`. Never run."""

from tessera.client import AdminClient, AsyncClient, ChatMessage, Client, GenerateOptions, Piece

client = Client("a:1")
client.generate("x", max_token=3)  # wrong
client.generate("x", max_tokens="3")  # wrong
client.generate({"text": "x"})  # wrong
client.generate_several("x")  # wrong
print(client.generate("x").txt)  # wrong
client.tokenize([1, 2])  # wrong
client.models()["m"]  # wrong
ChatMessage("user")  # wrong
Client("a:1", tls="ca.pem")  # wrong
AdminClient("a:1").abort(7)  # wrong
print(AdminClient("a:1").stats().load.running)  # wrong
OPTIONS: GenerateOptions = {"temprature": 1.0}  # wrong


def reason(piece: Piece) -> str:
    return piece.finish.reason.value  # wrong


async def text(asynchronous: AsyncClient) -> str:
    for piece in asynchronous.stream("x"):  # wrong
        print(piece)
    return asynchronous.generate("x").text  # wrong
