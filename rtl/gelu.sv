// GELU of docs/integer_network.md to int8, pipelined: a number a cycle, the output comes four cycles later.
// The constants of its channel come with a number.
module gelu (
    input  logic               clk,
    input  logic signed [31:0] u,           // rescaled sum, below 2^30 in magnitude
    input  logic        [13:0] multiplier,  // M, 0 to 2^13
    input  logic signed [31:0] offset,      // B, below 2^30 in magnitude
    input  logic        [4:0]  shift,       // n, 0 to 30
    output logic signed [7:0]  y
);
    // what each stage hands on: the positive part, r, and the channel's constants
    logic [16:0] positive1, positive2, positive3;
    logic [12:0] r1, r2;
    logic [13:0] multiplier1, multiplier2, multiplier3;
    logic signed [31:0] offset1, offset2, offset3;
    logic [4:0] shift1, shift2, shift3;

    logic [31:0] magnitude;
    logic [15:0] z2;
    logic [14:0] w3, h3;
    logic [12:0] r3;
    logic [15:0] z;
    logic [14:0] w;
    logic signed [31:0] tail, g, wide;
    logic signed [7:0] fitted;

    assign magnitude = u < 0 ? -u : u;
    mul_round #(.SHIFT(9), .OUT(16)) square (.a({19'd0, r1}), .b({19'd0, r1}), .y(z));
    mul_round #(.SHIFT(15), .OUT(15)) first (.a({16'd0, z2}), .b(32'sd59898 - 32'sd10 * {19'd0, r2}), .y(w));
    assign h3 = 15'({15'd0, w3} << 2) + 15'(32'sd18588 - 32'sd23 * {19'd0, r3});
    mul_round #(.SHIFT(20)) second (.a({17'd0, w3}), .b({17'd0, h3}), .y(tail));
    assign g = {15'd0, positive3} - tail;
    assign wide = g * {18'd0, multiplier3} + offset3;
    saturate #(.IN(32), .OUT(8)) fit (.x(wide >>> shift3), .y(fitted));

    always_ff @(posedge clk) begin
        positive1 <= u < 0 ? 17'd0 : u > 32'sd131071 ? 17'd131071 : u[16:0];
        r1 <= magnitude < 32'd4096 ? 13'd4096 - magnitude[12:0] : 13'd0;
        {multiplier1, offset1, shift1} <= {multiplier, offset, shift};

        z2 <= z;
        {positive2, r2, multiplier2, offset2, shift2} <= {positive1, r1, multiplier1, offset1, shift1};

        w3 <= w;
        {positive3, r3, multiplier3, offset3, shift3} <= {positive2, r2, multiplier2, offset2, shift2};

        y <= fitted;
    end
endmodule
