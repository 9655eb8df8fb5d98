"""Common English words for the generated tasks. No word is part of another one."""

ADJECTIVE_LIST = """
absent active actual adult alert alien alike alive ample ancient angry annual anxious arid artful ashen asleep
astute august autumnal avid awake aware azure bare barren basic beige benign bitter bland bleak blessed blind
blissful blond blunt bold bony bored bossy brave brazen breezy brief bright brisk brittle broad broken bronzed
bubbly bulky bumpy buoyant burly burnt busy buttery calm candid careful careless casual cautious central
certain chalky charming cheap cheerful chief childish chilly chubby civic civil classic clean clear clever
clumsy coarse cold colossal comic common compact complex constant content cool cordial corrupt cosmic costly
courteous covert cozy cranky creamy crimson crisp crooked crude cruel crumbly cryptic cubic cunning curious
curly cursed curved daily dainty damp dapper daring dazzling dead deaf dear decent deep defiant deft delicate
dense devout digital dim dingy direct dirty discreet dismal distant dizzy docile domestic double dreamy dreary
drowsy dry dull durable dusty dutiful earnest eastern edible eerie elastic elder elegant eligible elite
eloquent eminent empty enormous entire epic equal erratic eternal ethical evident exact exotic expert extinct
extra fabled faded faint fair faithful false famed familiar famous fancy fast fatty faulty favored fearless
feeble female feral fertile festive fickle fierce fiery final firm fiscal fishy fitting fixed flaky flashy
flat fleeting flexible floral fluent fluffy fluid flustered foggy fond foolish foreign formal fortunate
fragile fragrant frail frank frantic free frequent fresh friendly frigid frosty frozen frugal fruity full
funny furry fussy futile fuzzy gallant gaudy gaunt generous gentle genuine giant giddy gifted gigantic glad
glassy gleaming global gloomy glorious glossy golden gothic graceful gradual grand greasy great greedy green
gritty groggy gross grouchy grubby grumpy guilty gullible gusty hairy handsome handy happy harmful harsh hasty
haughty hazy healthy heavy hectic helpful helpless hidden high hoarse hollow holy homely honest hopeful
horrible hostile huge humble humid hungry hurried hushed husky ideal idle ignorant immense imperial impish
improper inborn indigo inept infinite initial inland innocent intact intense internal intimate inward ironic
irregular itchy jagged jaunty jealous jittery joint jolly jovial joyful jubilant juicy junior just keen kind
knotty known languid large lasting lavish lawful lazy leafy lengthy lenient lethal level liberal likable
limber limp linear liquid literal little lively livid local lofty lonely loose lopsided lovely loyal lucid
lucky lukewarm lumpy lunar luxurious lyrical magenta magic magnetic main majestic major mammoth mature meager
mealy medical meek mellow mental merry messy metallic mighty mild milky minor minty misty mobile modern modest
moist moldy moral mortal motley muddy muffled mundane murky musical musty mute mutual mysterious naive narrow
nasal nasty native natural naughty nautical naval neat needy nervous neutral nimble noble nocturnal noisy
normal northern nosy notable novel numeric obedient oblong obscure obvious offbeat official oily ominous
opaque open optimal orderly ordinary organic ornate outer oval overdue painful paltry parched partial passive
patient peaceful pearly peculiar perfect perky petite petty piercing pink pious placid plain planned plastic
playful pleasant plump plush poetic pointed polar polished polite poor popular portable posh possible potable
potent powdery practical precious precise premium prickly primal prime pristine private profound prompt proud
prudent public puffy pungent puny pure purple puzzled quaint qualified queasy quick quiet quirky radiant
ragged rainy random rapid rare rash raspy ready rebel recent regal reliable remote repentant roasted robust
rocky romantic roomy rosy rotten rough round rowdy royal rubbery ruddy rugged runny rural rustic sacred safe
salty same sandy sane sarcastic satin savory scaly scant scarce scary scenic scented scientific scornful
scruffy secure selfish senior sensible separate serene serious severe shabby shady shaggy shallow sharp sheer
shiny short showy shrewd shrill silent silken silly simple sincere single skeletal skilled skinny sleek sleepy
slender slight slim slippery sloppy slow sluggish sly small smart smoggy smooth smug snappy sneaky snowy snug
sober sociable soft soggy solar solemn solid somber sore sour southern sparse special speedy spicy spiky
spiral splendid spotless spry square stable staid stale stark starry static steady steel steep sterile sticky
stiff still stingy stoic stormy stout straight strange strict striped strong stubborn sturdy stylish suave
subtle sudden sugary sullen sunny superb supple surly svelte sweet swift symbolic tacky tactful tame tangible
tangy tardy tart tasty taut tawny tedious teeny temperate tender tepid terse thankful thick thin thirsty
thorny thrifty tight timid tiny tired total tough toxic tragic trained tranquil tricky trifling trim tropical
true trusty turbulent twin typical ugly ultimate unfit uniform unique united unkempt unlit unripe unruly
untidy upbeat upper upright urgent useful usual vacant vague vain valiant valid valuable vapid vast velvety
venerable verbal verdant versed vibrant vicious vigilant violet virtual visible vital vivid vocal void
volatile wacky wary wasteful watchful watery wavy waxy weak wealthy weary weekly weepy weird western wet
whimsical white whole wicked wide wiggly wild willing wily windy wintry wiry wise wistful witty wobbly woeful
wooden woolly wordy worldly worn worthy wrong young youthful yummy zany zealous zesty
"""
NOUN_LIST = """
abbey accent acorn agenda airport album alcove almond altar amber ambush anchor angle ankle anthem antler
anvil apple apricot apron arcade arena armor army artist ashes atlas attic auction author avenue award axle
badger bagel baker balcony ballad balloon bamboo banana bandit banjo banker banner barber bargain barley barn
barrel basket battery bazaar beacon bean beard beaver bedroom beetle beggar bell belt bench berry bicycle
biscuit bishop blanket blizzard blossom boat bone bonnet border bottle boulder bowl bracelet branch bread
breeze brewer brick bridge brother bubble bucket buckle buffalo bugle builder bullet bundle burrow butcher
button cabbage cabin cable cactus camel camera canal candle cannon canoe canvas canyon captain caravan carbon
cargo carpet carrot castle cathedral cattle cave cedar ceiling cellar cereal chain chair chapel chapter
charcoal chariot cheese cherry chestnut chicken chimney chisel choir cider cigar cinema circus citizen city
clarinet cliff cloak clock closet cloud clover clown coast cobweb cocoa coffee collar colony column comet
compass concert copper coral cork corner cottage cotton cousin cowboy crab cradle crane crater crayon creek
cricket crocodile crossing crown crystal cube cupboard curtain cushion custard cyclone cymbal dagger dairy
daisy dancer daughter dawn deacon debate decade delta dentist desert desk dessert detective diagram diamond
diary dice dinner diploma doctor dolphin donkey door dove dozen dragon drawer driver drummer duchess duke
dungeon dusk dwarf eagle earring echo eclipse editor eggplant elbow elephant elevator elk ember emblem emerald
emperor engine envelope envoy epoch essay estate evening exile fabric factory falcon family farmer father
faucet feast feather fence fern ferry festival fiddle field finger firefly fisherman flag flame flannel flask
flint flood flour flower flute foam folder forest forge fork fortress fossil fountain fox fridge frog funnel
furnace gadget galaxy gallery gallon garage garden garlic garment gate gazelle general geyser ghost ginger
giraffe glacier glove goat goblet goblin goose gorilla gown grain granite grape grass gravel grocer grotto
guard guest guitar gully gutter gypsum habit hallway hammer hammock hamster harbor harness harvest hat hawk
hazel headline heart hedge helmet herald herb hermit heron hinge hobby hockey holiday honey hoof horizon
hornet horse hospital hotel hound hour house hunter hurdle hut hyacinth iceberg idol igloo iguana inch infant
insect iris island ivory ivy jacket jaguar jar jasmine javelin jelly jersey jewel jigsaw jockey journal
journey judge jug juice jungle jury kangaroo kayak kennel kernel kettle kidney kimono king kitchen kite kitten
knapsack knife knight koala label laborer ladder lagoon lake lamp lantern larder lasso latch lawn lawyer
leather ledge legend lemon lemur lens leopard lesson letter library lightning lilac lily lime linen lizard
llama lobby lobster locket lodge lotus lumber lunch lynx machine magpie maiden mammal manager mango manor
mansion mantle maple marble margin market marsh mason mast mattress mayor meadow medal melody melon merchant
mermaid meteor metro mill mineral minister minnow mirror mitten model monarch monday money monkey monsoon
month moon moose mosaic mosque mosquito moss motor mountain mouse movie muffin mule museum mushroom musket
mustard napkin nation nature navy necklace nectar needle neighbor nephew nickel noodle nook notebook number
nursery nutmeg oasis ocean octopus office olive omelet onion opal opera orange orbit orchard orchid origin
ornament orphan ostrich oven owner oxygen oyster paddle page pagoda painter palace palette palm pancake panda
panel panther paper parade parcel parent park parrot parsley partner passage pasta pastry patio patrol
pavilion peach peacock peanut pebble pelican pencil penguin pepper perfume person petal phoenix piano pickle
picnic picture pigeon pilgrim pillar pillow pilot pine pioneer pipe pirate pitcher pizza planet plank plaster
plate platform plaza plow pocket poem poison pole police pollen pond pony popcorn poppy porch porridge potato
potter prairie president priest prince printer prison prize problem professor program pudding puddle pulley
pumpkin pupil puppet puppy pyramid python quail quarry quartz queen quest quilt quiver rabbit raccoon radar
radio radish raft railway raisin ranger raven razor recipe record reef referee reindeer report reptile resort
restaurant ribbon rice riddle robin robot rocket roof rooster root rose rudder ruler saddle saffron sail salad
salmon saloon samurai sandal sapphire satchel saucer sauna sausage savanna scarf scarlet scholar school
scissors scooter scorpion scout screw scribe sculptor season seat secretary seed sentry sermon servant shadow
shark sheep shelf shell shepherd sheriff shield ship shirt shoe shore shoulder shovel shrimp sibling sidewalk
signal silver singer siren sister sketch skull skunk slate sled sleeve slope smith smoke snail snake soap
soccer sock sofa soil soldier sonnet soup spade sparrow spear sphere spider spinach spring squid squirrel
stadium stage stair stamp stanza statue steam stem stereo stone stool store stork story stove straw stream
street student studio subway suitcase sultan summer summit sunset surgeon swamp swan sword syrup tablet tailor
tank tapestry target tassel tavern taxi teacher teapot teaspoon telescope temple tennis terrace theater thief
thimble thistle thread throne thumb thunder ticket tide tiger timber tinsel toad toast tobacco toddler toffee
tomato tongue tooth torch tornado tortoise tower town tractor trader traffic trail trapeze traveler treasure
trellis trench tribe trigger trolley trophy trout truck trumpet trunk tulip tundra tunnel turban turkey turnip
turtle tutor tuxedo typhoon umbrella uncle unicorn union universe urchin vacuum valley vampire vanilla vapor
vase vault vehicle veil vendor veranda vessel veteran village vinegar viola violin viper visitor vitamin
volcano voyage vulture wagon waiter wallet walnut walrus warden wardrobe warrior washer wasp weapon weasel
weather weaver wedding weekend whale wheat wheel whisker whistle widow wife willow window wine wing winter
wizard wolf woman workshop worm wreath wrench wrist writer yacht yard yarn yogurt yolk zebra zenith zephyr
zeppelin zinc zipper zodiac
"""
ADJECTIVES = tuple(ADJECTIVE_LIST.split())
NOUNS = tuple(NOUN_LIST.split())
