"""Names of the father-son probe."""

_TEXT = """
Aaron Adam Adrian Alan Albert Alex Alexander Alfred Allen Andrew Andy Anthony Arnold Arthur
Barry Ben Benjamin Bernard Bill Bob Brad Bradley Brandon Brendan Brent Brett Brian Bruce Bryan
Calvin Cameron Carl Charles Chris Christopher Clarence Clifford Colin Connor Craig Curtis Dan
Daniel Darren Dave David Dennis Derek Donald Doug Douglas Dylan Edgar Edward Edwin Elliott Eric
Ernest Ethan Eugene Evan Francis Frank Fred Frederick Gary Gavin Geoffrey George Gerald Gilbert
Glenn Gordon Graham Greg Gregory Harold Harry Harvey Henry Herbert Herman Howard Hugh Ian Isaac
Jack Jacob Jake James Jason Jeff Jeffrey Jeremy Jesse Jim Joe Joel John Jonathan Joseph Josh
Joshua Justin Karl Keith Ken Kenneth Kevin Kyle Larry Lawrence Leo Leon Leonard Lloyd Louis
Lucas Luke Malcolm Marcus Mark Martin Marvin Matthew Maurice Michael Mitchell Nathan Neil
Nicholas Noah Norman Oliver Oscar Owen Patrick Paul Peter Phil Philip Ralph Raymond Richard Rick
Robert Roger Roland Ron Ronald Roy Russell Ryan Sam Samuel Scott Sean Seth Shawn Simon Spencer
Stanley Stephen Steve Steven Stewart Stuart Ted Theodore Thomas Tim Timothy Todd Tom Tony Travis
Trevor Victor Vincent Walter Warren Wayne Wesley William
"""

NAMES: tuple[str, ...] = tuple(_TEXT.split())
"""Common English first names of men."""
